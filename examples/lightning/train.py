"""A LightningModule under DDP; a callback of two lines lets copy engines average its gradients.

python examples/lightning/train.py --devices 2
"""

import argparse
import sys

import torch
from torch import nn

from counterpoint.integrations import ddp


def main() -> None:
    """Twenty steps of a regression on random data; Lightning starts the other ranks itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--width", type=int, default=2048, help="features; a rank's part of a bucket needs 4 MiB")
    options = parser.parse_args()
    try:
        import lightning  # noqa: PLC0415  an extra package
    except ImportError:
        sys.exit("This example needs lightning: pip install lightning")

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(options.width, options.width) for _ in range(4)))

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            loss = self.layers(batch[0]).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    class Copies(lightning.Callback):
        def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
            self.averages = ddp.register(trainer.strategy.model)

        def on_train_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
            if trainer.is_global_zero:
                print(f"loss {trainer.callback_metrics['loss']:.6f}", self.averages, sep="\n")

    rows = torch.randn(40 * options.devices, options.width)
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=2)
    trainer = lightning.Trainer(
        strategy="ddp",
        devices=options.devices,
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        max_steps=20,
        callbacks=[Copies()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Regression(), batches)


if __name__ == "__main__":
    main()

"""The commands `machines` and `workloads`: list shipped files, show one, and save one as a template for one's own."""

from pathlib import Path

import click

from counterpoint.cli.options import Command, argument, complete_shipped, json_option, output_option
from counterpoint.errors import CounterpointError, shown
from counterpoint.value import check_outputs


@click.command(
    cls=Command,
    examples=(
        "counterpoint machines h200",
        "counterpoint machines h200 -o my.toml",
        "counterpoint machines --probe -o this.toml",
    ),
)
@argument(
    "name",
    metavar="[NAME]",
    required=False,
    shell_complete=complete_shipped("machines"),
    help="A machine's name or file (.toml).  [default: list all of them]",
)
@click.option("--probe", "is_probing", is_flag=True, help="Query and measure the GPUs of this machine instead.")
@output_option("Save the machine as a file that can be edited (.toml).")
@json_option
def machines(name: str | None, is_probing: bool, output: Path | None, is_json: bool) -> None:
    """List the machines that can be planned for, or show one.

    Every figure of a machine is printed with its source.
    """
    from counterpoint.machine import MACHINE, load_machine, machine_names, save_template  # noqa: PLC0415
    from counterpoint.report.shipped import print_machine, print_machines  # noqa: PLC0415
    from counterpoint.report.text import new_console  # noqa: PLC0415
    from counterpoint.value import write_json  # noqa: PLC0415

    if is_probing:
        _probe_machine(name, output, is_json)
        return
    if output is not None:
        if name is None:
            raise CounterpointError(f"Which machine should '{shown(output)}' hold? Name one, or add --probe for this one.")
        check_outputs(((output, MACHINE),), (name,))
        save_template(name, output)
    found = [load_machine(each) for each in ([name] if name is not None else machine_names())]
    if is_json:
        print(write_json(found[0] if name is not None else found))
    elif name is not None:
        print_machine(new_console(), found[0])
        if output is not None:
            print(f"Machine saved to {output}. Change its name and figures, then use it: --machine {output}")
    else:
        print_machines(new_console(), found)


def _probe_machine(name: str | None, output: Path | None, is_json: bool) -> None:
    from counterpoint.cuda.probing import probe  # noqa: PLC0415
    from counterpoint.machine import MACHINE, save_machine  # noqa: PLC0415
    from counterpoint.report.shipped import print_probed  # noqa: PLC0415
    from counterpoint.report.text import new_console  # noqa: PLC0415
    from counterpoint.value import write_json  # noqa: PLC0415

    if name is not None:
        raise CounterpointError(f"--probe looks at the GPUs of this machine, not at '{name}'. Leave out one of the two.")
    check_outputs(((output, MACHINE),))
    probed = probe()
    if output is not None:
        save_machine(probed.machine, output)
    if is_json:
        print(write_json(probed))
        return
    print_probed(new_console(), probed)
    if output is not None:
        print(f"Machine saved to {output}. Use it: --machine {output}")


@click.command(
    cls=Command,
    examples=(
        "counterpoint workloads cb_ar_opt2",
        "counterpoint workloads cb_ar_opt2 -o my.toml",
    ),
)
@argument(
    "name",
    metavar="[NAME]",
    required=False,
    shell_complete=complete_shipped("workloads"),
    help="A workload's name or file (.toml).  [default: list all of them]",
)
@output_option("Save the workload as a file that can be edited (.toml).")
@json_option
def workloads(name: str | None, output: Path | None, is_json: bool) -> None:
    """List the workloads that ship with Counterpoint, or show one.

    A workload describes a step without a trace: matmuls, kernels, collectives and copies, and what waits for what.
    """
    from counterpoint.report.shipped import print_workloads  # noqa: PLC0415  a fast --help
    from counterpoint.report.text import new_console  # noqa: PLC0415
    from counterpoint.value import write_json  # noqa: PLC0415
    from counterpoint.workloads import load_description, save_template, workload_names, workload_text  # noqa: PLC0415
    from counterpoint.workloads.reader import WORKLOAD  # noqa: PLC0415

    if output is not None:
        if name is None:
            raise CounterpointError(f"Which workload should '{shown(output)}' hold? Name one.")
        check_outputs(((output, WORKLOAD),), (name,))
        save_template(name, output)
    found = [load_description(each) for each in ([name] if name is not None else workload_names())]
    if is_json:
        print(write_json(found[0] if name is not None else found))
    elif name is None:
        print_workloads(new_console(), found)
    elif output is None:
        print(workload_text(name), end="")
    else:
        print(f"Workload saved to {output}. Change its name and sizes, then use it: counterpoint tune {output}")

"""The command line: `main` is its entry, `options` what commands share; the other modules hold the commands."""

"""The subcommands of `headrace`, one a file: each module has a `command`."""

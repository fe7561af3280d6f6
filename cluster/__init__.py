"""The control plane: Ray deployment, controller, and the `headrace` command."""

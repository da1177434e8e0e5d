"""The command that measures one arm, or a sweep of arms."""

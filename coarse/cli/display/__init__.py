"""Output of several commands: tables, and screens that change."""

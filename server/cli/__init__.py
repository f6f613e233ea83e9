"""The ``headlong`` command: one file a subcommand. It may call the engine's facade only."""

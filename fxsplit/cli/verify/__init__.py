"""The subcommand `verify`: prove that a pipeline is its model, also over the ranks that a launcher has started."""

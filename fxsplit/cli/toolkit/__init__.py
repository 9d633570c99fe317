"""The subcommands `opt` and `passes`: the IR and its passes by themselves."""

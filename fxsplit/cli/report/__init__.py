"""The subcommand `report`: a page about a plan, and the files that it is made from."""

"""The public verbs: compile, plan, profile, verify."""

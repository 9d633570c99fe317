"""profile: measure what every node takes, makes and keeps; learns Costs."""

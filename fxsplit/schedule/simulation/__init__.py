"""How long a schedule takes, from how long each action takes, and what devices hold meanwhile."""

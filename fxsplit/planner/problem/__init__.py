"""The search problem: states, moves between them, what each costs, and what each must hold."""

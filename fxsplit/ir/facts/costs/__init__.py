"""Costs: what each node takes, makes and keeps, what crosses a cut, and how all of that is known."""

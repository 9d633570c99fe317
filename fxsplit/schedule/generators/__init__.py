"""What makes schedules: a function for each kind, list scheduling, and the catalogue of their names."""

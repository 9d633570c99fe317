"""Watch which Python values forward() reads and writes: a graph holds their values during the capture."""

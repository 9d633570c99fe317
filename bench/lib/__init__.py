"""What the benchmarks share: networks and profiles to measure, peers to measure beside, and the tables."""

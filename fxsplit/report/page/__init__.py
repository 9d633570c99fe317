"""The report: one HTML file about a plan, which needs no server and no network."""

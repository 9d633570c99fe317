"""The second front end, torch.export: run it (exporter), then write its program as a graph of the model (inline)."""

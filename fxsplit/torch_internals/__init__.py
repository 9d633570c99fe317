"""All that knows torch's private parts, and nothing of pipelines."""

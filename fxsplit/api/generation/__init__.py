"""Generate text: Hugging Face's own loop calls a pipeline whose stages keep the attention's keys and values."""

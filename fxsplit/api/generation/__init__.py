"""Generate text with Hugging Face's own loop over a pipeline whose stages keep their keys and values."""

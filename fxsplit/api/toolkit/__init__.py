"""Use the IR by itself: capture a model, run passes, and read what a file holds."""

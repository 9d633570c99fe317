"""What is changed for a while and put back: modes of torch and of its threads, patched methods, logs."""

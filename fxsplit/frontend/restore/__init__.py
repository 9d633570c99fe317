"""What a run of the model may change is put back, entry by entry, if it is the user's own."""

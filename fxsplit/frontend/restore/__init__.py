"""Undo the changes that a run of the model makes to the user's own objects, entry by entry."""

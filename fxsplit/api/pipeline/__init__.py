"""The Pipeline that compile() returns: called, trained, streamed, saved and loaded like its model."""

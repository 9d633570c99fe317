"""The Pipeline that compile() returns. It is called, trained, streamed, saved and loaded like its model."""

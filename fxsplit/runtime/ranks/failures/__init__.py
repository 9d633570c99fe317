"""Failure detection: every waiting rank learns that another rank has failed or left."""

"""Failures: how ranks learn that another one has failed or left, wherever they wait."""

"""Where workers live."""

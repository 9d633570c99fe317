"""Compile a model for a call, and keep the program for as long as it is right."""

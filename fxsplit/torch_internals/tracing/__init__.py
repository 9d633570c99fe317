"""What torch does while it traces or exports a model: what it changes, asks of sizes, and writes down."""

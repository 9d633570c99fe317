"""Side effects and costs of torch's own tracing and export: global state, symbolic sizes, generated code."""

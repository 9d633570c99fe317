"""The subcommand `demo`: train ResNet-18 as a pipeline on real images, phase by phase."""

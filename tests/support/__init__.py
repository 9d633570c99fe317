"""What tests share: models, graphs, ranks in processes of their own, stated times, interrupts."""

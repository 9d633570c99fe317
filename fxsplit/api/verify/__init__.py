"""verify(): a pipeline held against its model, and how each difference is explained."""

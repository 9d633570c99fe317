"""A job: one run of a schedule on one batch, and what its workers share."""

"""A job: one run of a schedule on one batch, with the state that its workers share."""

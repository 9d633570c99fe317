"""Share equal devices among training jobs: the best counts for one moment, and days of devices that come and go."""

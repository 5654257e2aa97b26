"""Tools of any process: scratch folders, priorities, notices of late or lost peers, failpoints for tests."""

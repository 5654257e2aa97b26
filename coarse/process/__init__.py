"""What any process needs: scratch folders, priorities, notices of late or lost peers, failpoints for tests."""

"""What run.py and the peer scripts share."""

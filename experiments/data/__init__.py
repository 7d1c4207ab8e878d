"""Text to token ids to batches."""

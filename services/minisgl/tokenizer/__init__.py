"""The worker that turns prompts into token ids and chooses the group that answers."""

"""Workers as actors of a Ray cluster: where they are placed, how they are kept running, and how they leave."""

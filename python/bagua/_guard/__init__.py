"""Guard: measures what compressed and decentralized training loses, and makes buckets exact."""

"""The bytes that a process sends: counted, and slowed down to a link's speed."""

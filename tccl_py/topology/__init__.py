"""What a machine is: its structure, what else is known of it, and readers that find out."""

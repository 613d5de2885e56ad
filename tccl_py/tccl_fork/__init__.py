"""The database and the XML file of TCCL's NCCL fork."""

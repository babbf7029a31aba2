"""The wire format and its generated stubs. Only ``transport`` reads them."""

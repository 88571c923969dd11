"""The data types that modules and processes exchange: frozen structs with almost no behaviour."""

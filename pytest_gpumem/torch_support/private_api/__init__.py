"""All uses of torch's private names, each in a function. Tests check them with every supported torch release."""

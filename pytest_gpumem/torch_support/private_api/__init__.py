"""All uses of torch's private names, each in a function. A test checks every function with every supported torch release."""

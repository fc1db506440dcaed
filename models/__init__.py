"""Models for small images; those for ImageNet are torchvision's."""

from models.digits_cnn import DigitsCNN as DigitsCNN
from models.resnet_cifar import resnet18 as resnet18
from models.resnet_cifar import resnet20 as resnet20
from models.resnet_cifar import resnet56 as resnet56
from models.resnet_cifar import resnet110 as resnet110
from models.vgg_cifar import vgg16_bn as vgg16_bn
